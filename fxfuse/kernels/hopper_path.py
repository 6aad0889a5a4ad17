"""The path for Hopper: products in Gluon, the rest as everywhere."""

from .bias import bias_gradient
from .combine import combine
from .hopper_launch import dh, matmul, up, wgrad
from .routing import route

__all__ = ["bias_gradient", "combine", "dh", "matmul", "route", "up", "wgrad"]
