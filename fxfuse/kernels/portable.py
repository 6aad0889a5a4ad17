"""The path in plain Triton, for every GPU from sm_80 on: no tensor descriptors, no warp specialisation."""

from .bias import bias_gradient
from .combine import combine
from .dh import dh
from .launch import tile_list
from .matmul import matmul
from .pairs import router_gradient, sorted_pairs, spread
from .routing import route
from .up import up
from .wgrad import wgrad

__all__ = [
    "bias_gradient",
    "combine",
    "dh",
    "matmul",
    "route",
    "router_gradient",
    "sorted_pairs",
    "spread",
    "tile_list",
    "up",
    "wgrad",
]
