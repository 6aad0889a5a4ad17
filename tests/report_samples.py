"""Small reports for the tests of report, display, trace and the command line."""

from __future__ import annotations

from typing import Any

from fxfuse.report import Failure, Fused, GraphRecord, Missed, Report

BEFORE = """\
def forward(self, primals, tangents):
    primals_1, primals_2, primals_3, tangents_1, = fx_pytree.tree_flatten_spec([primals, tangents], self._in_spec)
    # No stacktrace found for following nodes
    permute: "f32[8, 16]" = torch.ops.aten.permute.default(primals_1, [1, 0]);  primals_1 = None
    addmm = torch.ops.aten.addmm.default(primals_2, primals_3, permute);  primals_2 = permute = None
    gelu = torch.ops.aten.gelu.default(addmm)
    sin = torch.ops.aten.sin.default(gelu)
    cos = torch.ops.aten.cos.default(gelu);  gelu = None
    mul = torch.ops.aten.mul.Tensor(tangents_1, cos);  cos = tangents_1 = None
    gelu_backward = torch.ops.aten.gelu_backward.default(mul, addmm);  mul = addmm = None
    mm = torch.ops.aten.mm.default(gelu_backward, primals_3);  primals_3 = None
    return pytree.tree_unflatten([sin, mm], self._out_spec)
"""
AFTER = """\
def forward(self, primals, tangents):
    primals_1, primals_2, primals_3, tangents_1, = fx_pytree.tree_flatten_spec([primals, tangents], self._in_spec)
    linear_act = torch.ops.fxfuse.linear_act.default(primals_3, primals_1, primals_2, 'gelu', True)
    getitem = linear_act[0]
    getitem_1 = linear_act[1];  linear_act = None
    sin = torch.ops.aten.sin.default(getitem)
    cos = torch.ops.aten.cos.default(getitem);  getitem = None
    mul = torch.ops.aten.mul.Tensor(tangents_1, cos);  cos = tangents_1 = None
    linear_act_backward = torch.ops.fxfuse.linear_act_backward.default(mul, primals_3, getitem_1, 'gelu');  getitem_1 = None
    return pytree.tree_unflatten([sin, linear_act_backward], self._out_spec)
"""


def fused(**changes: Any) -> Fused:
    """A linear + GELU, joint."""
    fields: dict[str, Any] = {
        "name": "linear_gelu",
        "graph": "joint",
        "directions": ("forward", "backward"),
        "ops": ("aten.addmm", "aten.gelu", "aten.gelu_backward", "aten.mm"),
        "source": "/home/alice/net.py:12  F.gelu(self.fc(x))",
        "layer": "layers.0.mlp",
        "saved": ("addmm",),
        "kernel": "inline",
        "before": ("permute", "addmm", "gelu", "gelu_backward", "mm"),
        "after": ("linear_act", "getitem", "getitem_1", "linear_act_backward"),
    }
    return Fused(**{**fields, **changes})


def missed(**changes: Any) -> Missed:
    """A GELU of the other kind."""
    fields: dict[str, Any] = {
        "name": "linear_gelu",
        "matched": 3,
        "total": 4,
        "reason": "gelu: pattern has approximate 'none', model has 'tanh'",
        "node": "gelu_9",
        "source": "/home/alice/net.py:31  F.gelu(y, approximate='tanh')",
        "layer": "layers.4.mlp",
        "graph": "joint",
    }
    return Missed(**{**fields, **changes})


def graph(kind: str = "joint", fused: tuple[Fused, ...] = (), missed: tuple[Missed, ...] = (), **changes: Any) -> GraphRecord:
    """A graph with the code above."""
    return GraphRecord(kind, changes.pop("before", BEFORE), changes.pop("after", AFTER), fused, missed, 181, 0.0042, **changes)


def sample() -> Report:
    """Four numbered layers, one add, two equal misses, one inside a fused region, one failure."""
    layers = tuple(
        fused(layer=f"layers.{i}.mlp", saved=(f"addmm_{i}" if i else "addmm",), before=(f"x_{i}",) if i else fused().before)
        for i in range(4)
    )
    add = fused(
        name="linear_add",
        layer="head",
        directions=("forward",),
        saved=(),
        source="/home/alice/net.py:40",
        before=("sin",),
        after=("sin",),
    )
    misses = (missed(), missed(layer="layers.5.mlp", node="gelu_10"), missed(name="linear_relu", node="gelu"))
    failure = Failure("launch", "gated_mlp_silu", "RuntimeError: out of shared memory\n  at /home/alice/k.py:3")
    return Report([graph(fused=(*layers, add), missed=misses), graph("inference")], [failure], "default", "a")
