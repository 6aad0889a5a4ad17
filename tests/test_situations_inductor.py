"""One block with a user's own graph passes, with Inductor's modes and options, and through Inductor itself."""

from __future__ import annotations

import pytest
import situations
import torch
import torch.nn.functional as F
from situations import FUSED, Block, assert_fused, assert_same, check, rows, step

import fxfuse


def test_users_joint_pass_runs_after_ours() -> None:
    seen: list[list[str]] = []

    def mine(graph: torch.fx.Graph) -> None:
        seen.append([str(n.target) for n in graph.nodes if n.op == "call_function"])

    check(Block(), rows(), joint_custom_pre_pass=mine)
    assert len(seen) == 1 and any("fxfuse.linear_act" in target for target in seen[0])


def test_users_joint_pass_in_inductors_configuration_runs_too() -> None:
    seen: list[int] = []
    with torch._inductor.config.patch(joint_custom_pre_pass=lambda graph: seen.append(len(graph.nodes))):
        check(Block(), rows())
    assert len(seen) == 1


def test_users_joint_pass_may_change_the_graph() -> None:
    def doubled(graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            node.target = torch.ops.aten.cos.default

    run = torch.compile(
        lambda x, w: F.gelu(F.linear(x, w)).sin(), backend="fxfuse", options={"lower": "eager", "joint_custom_pre_pass": doubled}
    )
    x, w = rows(4, 16, grad=False), torch.randn(8, 16)
    torch.testing.assert_close(run(x, w), F.gelu(F.linear(x, w)).cos())


@pytest.mark.inductor
def test_users_post_grad_pass() -> None:
    seen: list[int] = []
    model, x = Block(), rows()
    run = torch.compile(model, backend="fxfuse", options={"post_grad_custom_post_pass": lambda graph: seen.append(1)})
    assert_same(step(run, model, x), step(model, model, x))
    assert len(seen) == 2  # forward and backward
    assert_fused(fxfuse.last_report(), FUSED)


@pytest.mark.inductor
def test_freezing() -> None:
    model, x = Block().eval(), rows(6, 16, grad=False)
    run = torch.compile(model, backend="fxfuse", options={"freezing": True})
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
        torch.testing.assert_close(run(x), model(x))
    assert_fused(fxfuse.last_report(), FUSED)


@pytest.mark.inductor
@pytest.mark.parametrize("mode", ["max-autotune", "max-autotune-no-cudagraphs", "reduce-overhead", "default"])
def test_modes(mode: str) -> None:
    model, x = Block(), rows()
    run = torch.compile(model, backend="fxfuse", mode=mode)
    assert_same(step(run, model, x), step(model, model, x))
    assert_fused(fxfuse.last_report(), FUSED)
    assert ("max" in mode) == ("max" in fxfuse.plan_info().plans[0].key.options)


@pytest.mark.inductor
@pytest.mark.slow
def test_cpp_wrapper() -> None:
    model, x = Block(), rows()
    run = torch.compile(model, backend="fxfuse", options={"cpp_wrapper": True})
    assert_same(step(run, model, x), step(model, model, x))
    assert_fused(fxfuse.last_report(), FUSED)


@pytest.mark.inductor
def test_through_inductor_in_every_grad_mode() -> None:
    model = Block()
    run = torch.compile(model, backend="fxfuse", fullgraph=True)
    for n in (6, 3, 6):
        x = rows(n, 16)
        assert_same(step(run, model, x), step(model, model, x))
        with torch.inference_mode():
            assert_same(step(run, model, x), step(model, model, x))
    assert all(situations.FUSED.items() <= {f.name: r.count(f.name) for f in r.fused}.items() for r in fxfuse.reports())
