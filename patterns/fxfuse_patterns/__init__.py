"""The built-in pattern pack. It uses public names of fxfuse only: any file here can be copied into a pack of your own.

Within a kind, fusions are tried in the order of the imports below: larger patterns first.
"""

from . import scaled_linear, grouped_mlp, routed_rows, gated_mlp, linear_activation, backward, linear_add, linear_scale  # noqa: F401, I001
