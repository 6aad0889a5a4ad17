"""The path in plain Triton, for every GPU from sm_80 on: no tensor descriptors, no warp specialisation."""

from .bias import bias_gradient
from .combine import combine
from .dh import dh
from .matmul import matmul
from .routing import route
from .up import up
from .wgrad import wgrad

__all__ = ["bias_gradient", "combine", "dh", "matmul", "route", "up", "wgrad"]
