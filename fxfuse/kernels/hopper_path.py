"""The path for Hopper: products in Gluon, the rest as everywhere."""

from .bias import bias_gradient
from .combine import combine
from .hopper_launch import dh, matmul, tile_list, up, wgrad
from .pairs import router_gradient, sorted_pairs, spread
from .routing import route

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
