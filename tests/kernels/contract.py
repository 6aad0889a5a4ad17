"""What every path of kernels promises, as checks against the twins in fp64: on any device, at any size.

Rows of no expert are poisoned with NaN in every operand, and must be zero in every result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fxfuse.kernels import reference

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
TOLERANCE = {F32: 5e-6, F16: 1e-3, BF16: 8e-3}
"""Relative in norm: of a result rounded once from an exact one."""
SUMS = 1e-4
"""The same of what stays in fp32 from 16-bit operands: no product on the way was rounded."""
NAN = float("nan")

ENDS: dict[str, tuple[int, list[int]]] = {
    "some rows of no expert": (37, [3, 3, 20, 31, 33]),
    "every row used": (37, [0, 16, 16, 32, 37]),
    "one busy": (37, [0, 0, 37, 37, 37]),
    "all idle": (5, [0, 0, 0, 0, 0]),
    "one token": (2, [0, 1, 1, 2, 2]),
    "no rows": (0, [0, 0, 0, 0, 0]),
    "one expert": (19, [19]),
    "many rows an expert": (171, [150]),
    "more experts than rows": (3, [0] * 4 + [1] * 3 + [2] * 5),
}
"""Rows, and the row after each expert's last one."""
VARIANTS: dict[str, dict[str, Any]] = {
    **{act: {"act": act} for act in ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh", "quick_gelu")},
    "limit": {"limit": 0.7},
    "alpha": {"alpha": 1.702},
    "limit and alpha": {"limit": 0.7, "alpha": 1.702},
}
LAYOUTS = ("concat", "interleaved", "separate", "plain")
STORED = ("rows", "columns", "padded")
"""A weight with the inner width contiguous, with the outer one, with room between its rows and matrices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call: sizes, what is stored how, options."""

    ends: str = "some rows of no expert"
    at: tuple[int, list[int]] | None = None
    """Rows and ends, where they have no name."""
    hidden: int = 40
    inner: int = 9
    dtype: torch.dtype = F32
    device: str = "cpu"
    layout: str = "concat"
    stored: str = "rows"
    gathers: bool = True
    biases: bool = True
    weights: bool = True
    act: str = "silu"
    limit: float | None = None
    alpha: float | None = None
    save: bool = True

    @property
    def rows(self) -> int:
        return (self.at or ENDS[self.ends])[0]

    @property
    def experts(self) -> int:
        return len((self.at or ENDS[self.ends])[1])

    @property
    def used(self) -> int:
        return (self.at or ENDS[self.ends])[1][-1]

    def offsets(self) -> Tensor:
        return torch.tensor((self.at or ENDS[self.ends])[1], dtype=torch.int32, device=self.device)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=self.device) * scale).to(self.dtype)

    def sorted_rows(self, width: int) -> Tensor:
        """(S, width), poisoned past the last used row."""
        t = self.normal(self.rows, width)
        t[self.used :] = NAN
        return t

    def tokens(self, width: int) -> tuple[Tensor, Tensor | None]:
        """Rows (T, width) and where each sorted row finds its own; those of no expert find NaN."""
        if not self.gathers:
            return self.sorted_rows(width), None
        count = max(1, self.rows // 2)
        t = torch.cat([self.normal(count, width), torch.full((1, width), NAN, device=self.device).to(self.dtype)])
        gather = torch.randint(count, (self.rows,), device=self.device)
        gather[self.used :] = count
        return t, gather

    def weight(self, rows: int, columns: int) -> Tensor:
        """(E, rows, columns), its values such that products stay near one."""
        shape, scale = (self.experts, rows, columns), self.hidden**-0.5
        if self.stored == "columns":
            return self.normal(self.experts, columns, rows, scale=scale).transpose(1, 2)
        if self.stored == "padded":
            return self.normal(self.experts, rows + 3, columns + 8, scale=scale)[:, 2:-1, :columns]
        return self.normal(*shape, scale=scale)

    @property
    def wide(self) -> int:
        """The width of h."""
        return 2 * self.inner if self.layout in ("concat", "interleaved") else self.inner

    def kind(self) -> tuple[str, str, float | None, float | None]:
        alpha = None if self.layout == "plain" else self.alpha
        return self.act, self.layout, self.limit, alpha


def exact(args: Sequence[Any]) -> list[Any]:
    """The same in fp64."""
    return [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]


def error(got: Tensor, want: Tensor) -> float:
    """Relative in norm; infinite where got has a NaN."""
    if got.numel() == 0:
        return 0.0
    difference = (got.double() - want.double()).norm()
    return float("inf") if not difference.isfinite() else (difference / want.double().norm().clamp_min(1e-30)).item()


def same(name: str, got: Tensor, want: Tensor, tolerance: float, dtype: torch.dtype) -> None:
    assert got.shape == want.shape and got.dtype is dtype, (name, got.shape, want.shape, got.dtype)
    assert got.is_contiguous(), (name, got.stride())
    assert error(got, want) <= tolerance, (name, error(got, want))


def same_rows(case: Case, names: Sequence[str], got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float) -> None:
    for name, g, w in zip(names, got, want, strict=True):
        same(name, g, w, tolerance, case.dtype)
        assert not g[case.used :].any(), f"{name}: rows of no expert are not zero"


def check_up(path: ModuleType, case: Case) -> None:
    x, gather = case.tokens(case.hidden)
    w = case.weight(case.wide, case.hidden)
    w_up = case.weight(case.inner, case.hidden) if case.layout == "separate" else None
    b = case.normal(case.experts, case.wide) if case.biases and case.layout != "separate" else None
    args = (x, gather, w, w_up, b, case.offsets(), *case.kind(), case.save)
    got, want = path.up(*args), reference.up(*exact(args))
    same_rows(case, ["a"], got[:1], want[:1], 3 * TOLERANCE[case.dtype])  # rounded with h before
    if not case.save:
        assert got[1].shape == got[2].shape == (0,)
        return
    same_rows(case, ["h"], got[1:2], want[1:2], TOLERANCE[case.dtype])
    if case.layout == "separate":
        same_rows(case, ["u"], got[2:], want[2:], TOLERANCE[case.dtype])


def check_matmul(path: ModuleType, case: Case, transposed: bool) -> None:
    a = case.sorted_rows(case.inner)
    w = case.weight(case.hidden, case.inner) if transposed else case.weight(case.inner, case.hidden)
    bias = case.normal(case.experts, case.hidden) if case.biases else None
    got = path.matmul(a, w, case.offsets(), transposed=transposed, bias=bias, zero_tail=True)
    want = reference.matmul(
        a.double(), w.double(), case.offsets(), transposed=transposed, bias=None if bias is None else bias.double()
    )
    same_rows(case, ["matmul"], [got], [want], TOLERANCE[case.dtype])
    short = path.matmul(a, w, case.offsets(), transposed=transposed, bias=bias, zero_tail=False)
    assert torch.equal(short[: case.used], got[: case.used])


def check_dh(path: ModuleType, case: Case) -> None:
    grad, gather = case.tokens(case.hidden)
    h = case.sorted_rows(case.wide)
    u = case.sorted_rows(case.inner) if case.layout == "separate" else None
    p = torch.rand(case.rows, device=case.device) if case.weights else None
    if p is not None:
        p[case.used :] = NAN
    args = (grad, gather, case.weight(case.hidden, case.inner), p, h, u, case.offsets(), *case.kind())
    got, want = path.dh(*args), reference.dh(*exact(args))
    same_rows(case, ["dh", "a_scaled"], (got[0], got[3]), (want[0], want[3]), TOLERANCE[case.dtype])
    if case.layout == "separate":
        same_rows(case, ["du"], got[1:2], want[1:2], TOLERANCE[case.dtype])
    assert got[2].dtype is F32 and got[2].dim() == 2
    assert error(got[2].sum(1), want[2].sum(1)) <= SUMS and not got[2][case.used :].any()


def check_wgrad(path: ModuleType, case: Case) -> None:
    tokens, gather = case.tokens(case.hidden)
    rows, ends = case.sorted_rows(case.inner), case.offsets()
    for args in ((rows, tokens, None, gather, ends), (tokens, rows, gather, None, ends)):
        got, want = path.wgrad(*args), reference.wgrad(*exact(args))
        same("wgrad", got, want, TOLERANCE[case.dtype], case.dtype)
        assert not got[torch.diff(ends, prepend=ends.new_zeros(1)) == 0].any(), "the gradient of an idle expert is not zero"


def check_bias(path: ModuleType, case: Case) -> None:
    d, gather = case.tokens(case.inner)
    p = torch.rand(case.rows, device=case.device) if case.weights else None
    if p is not None:
        p[case.used :] = NAN
    args = (d, case.offsets(), p, gather)
    same("bias", path.bias_gradient(*args), reference.bias_gradient(*exact(args)), TOLERANCE[case.dtype], case.dtype)


def random_ids(tokens: int, chosen: int, experts: int, device: str = "cpu", dtype: torch.dtype = torch.int64) -> Tensor:
    """(T, K), some of no expert."""
    ids = torch.randint(-1, experts + 1, (tokens, chosen), device=device, dtype=dtype)
    far = 2**40 if dtype is torch.int64 else 2**30
    return torch.where(torch.rand(ids.shape, device=device) < 0.05, far, ids)


def check_route(path: ModuleType, ids: Tensor, experts: int) -> None:
    got, want = path.route(ids, experts), reference.route(ids, experts)
    for name, g, w in zip(("order", "tokens", "inverse", "ends"), got, want, strict=True):
        assert g.dtype is w.dtype and torch.equal(g, w), name


def check_pairs(path: ModuleType, ids: Tensor, p: Tensor, experts: int) -> None:
    order, _, inverse, ends = reference.route(ids, experts)
    for given in (None, p):
        for got, want in zip(*[f(order, given, ids.shape[1]) for f in (path.sorted_pairs, reference.sorted_pairs)], strict=True):
            assert want is got is None or (got.dtype is want.dtype and torch.equal(got, want))
    for parts in (1, 3):
        dp = torch.randn(parts, ids.numel(), device=ids.device)
        for dtype in (F32, p.dtype):
            got = path.router_gradient(dp.t(), ids, inverse, dtype)
            want = reference.router_gradient(dp.t().contiguous().double(), ids, inverse, torch.float64)
            same("router", got, want, TOLERANCE[dtype], dtype)
    for hidden, dtype in ((40, F32), (1100, p.dtype)):
        b, grad = (torch.randn(n, hidden, device=ids.device).to(p.dtype) for n in (experts, len(ids)))
        dp = torch.randn(ids.numel(), 2, device=ids.device)
        got = path.router_gradient(dp, ids, inverse, dtype, b.t().contiguous().t(), grad, ends)
        want = reference.router_gradient(dp.double(), ids, inverse, torch.float64, b.double(), grad.double(), ends)
        same("router with a bias", got, want, TOLERANCE[dtype], dtype)


def check_spread(path: ModuleType, case: Case, tokens: int, chosen: int, weights: torch.dtype | None) -> None:
    """Lines of ``hidden`` and ``inner`` columns, also out of wider ones and with columns apart; ``weights``: the router's."""
    inverse = torch.randperm(tokens * chosen, device=case.device)
    p = None if weights is None else torch.rand(chosen, tokens, device=case.device).to(weights).t()
    grad, x = case.normal(tokens, case.hidden), case.normal(tokens, case.inner)
    apart = case.normal(tokens, 2 * case.hidden)
    for args in ((grad, x, p), (apart[:, : case.hidden], None, p), (apart[:, ::2], x, None)):
        got, want = (f.spread(*args, inverse, chosen) for f in (path, reference))
        for g, w in zip(got, want, strict=True):
            assert g is w is None or (g.dtype is w.dtype and g.is_contiguous() and torch.equal(g, w))


def check_combine(path: ModuleType, case: Case, tokens: int, chosen: int, experts: int, weights: Any) -> None:
    """``weights``: the dtype of the router weights, or None without them."""
    ids = random_ids(tokens, chosen, experts, case.device)
    *_, inverse, ends = reference.route(ids, experts)
    y = case.normal(tokens * chosen, case.hidden)
    y[int(ends[-1]) :] = NAN
    p = None if weights is None else torch.rand(chosen, tokens, device=case.device).to(weights).t()
    b = case.normal(experts, case.hidden) if case.biases else None
    like = y.new_empty(0)
    args = (y, p, b, ids, inverse, ends, like)
    got, want = path.combine(*args), reference.combine(*exact(args))
    same("combine", got, want, TOLERANCE[case.dtype], case.dtype)
