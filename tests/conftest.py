"""Isolation: every test starts with empty compiler caches, one seed and one thread, and leaves no fusion behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fxfuse


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    # torch itself warns when torch._inductor is first imported
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's winners decide nothing here, and get no company."""
    with fxfuse.config.patch(cache_dir=str(tmp_path_factory.mktemp("cache"))):
        yield


@pytest.fixture(autouse=True)
def isolated() -> Iterator[None]:
    """A fresh compiler before and after; fusions that the test registered are unregistered.

    Fusions of a module-scoped fixture are registered before this one runs and so survive until that fixture ends.
    """
    torch._dynamo.reset()
    fxfuse.reset()
    torch.manual_seed(0)
    before = {id(fusion) for fusion in fxfuse.list_fusions()}
    yield
    for fusion in fxfuse.list_fusions():
        if id(fusion) not in before:
            fusion.unregister()
    torch._dynamo.reset()
