"""Random functional aten graphs in which spellings and near misses of one computation meet.

A program is grown by families (``fuzz_families``): a few members of a random family are added at a time, each becomes an
operand of later ones. What eager refuses is left out. Values are small integers, so whatever is exact in the reals is exact
here.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from typing import Any

import torch
from fuzz_families import FAMILIES, IMPURE, TRANSCENDENTAL
from program_writer import UNFIT, Family, Members, Program, Writer

SHAPES = ((4, 4), (4, 4), (4,), (4,), (2, 4), (1, 4), (4, 1), (1,), (2, 2, 4), (2, 4, 4), (1, 4, 4), (4, 2), (2, 1, 4))
STEPS = 14


def generate(seed: int, dtype: torch.dtype = torch.float64, *, without: Sequence[Family] = (), impure: bool = False) -> Program:
    """A random program; ``impure`` adds random numbers and writes to memory, low precision has only what is exact in it."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    writer = Writer(rng, dtype)
    inputs = [torch.randint(-3, 4, shape, generator=generator).to(dtype) for shape in rng.sample(SHAPES, 6)]
    inputs.append(torch.randint(-3, 4, (4, 4), generator=generator))
    inputs += [torch.rand(shape, generator=generator) > 0.5 for shape in ((4,), (4, 4))]
    for v in inputs:
        writer.input(v.clone())
    families = [*FAMILIES, *(TRANSCENDENTAL if dtype is torch.float64 else ()), *(IMPURE if impure else ())]
    families = [family for family in families if family not in without]
    for _ in range(STEPS):
        members: Members = []
        with contextlib.suppress(*UNFIT):
            members = rng.choice(families)(writer)
        for member in rng.sample(members, min(len(members), rng.randint(2, 6))):
            with contextlib.suppress(*UNFIT):
                member()
    return Program(writer.graph, tuple(inputs))


def with_specials(inputs: Sequence[Any], seed: int) -> list[Any]:
    """The inputs with NaN and infinities in a few places."""
    generator = random.Random(seed)
    spoiled = []
    for t in inputs:
        t = t.clone()
        if t.is_floating_point():
            for k in generator.sample((float("nan"), float("inf"), -float("inf")), 2):
                t.view(-1)[generator.randrange(t.numel())] = k
        spoiled.append(t)
    return spoiled
