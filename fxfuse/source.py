"""Where in the user's program a node comes from."""

from __future__ import annotations

import re

from torch.fx import Node

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def source_line(node: Node) -> str:
    """``file:line  code`` of the innermost user frame, or the empty string."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    frames = [(i, m) for i, line in enumerate(lines) if (m := _FRAME.search(line))]
    if not frames:
        return ""
    i, frame = frames[-1]
    code = lines[i + 1].strip() if i + 1 < len(lines) else ""
    return f"{frame[1]}:{frame[2]}" + (f"  {code}" if code else "")


def layer_path(node: Node) -> str:
    """The path of the module that the node runs in, such as ``layers.3.mlp``."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    path = list(stack.values())[-1][0].replace("_modules", "")
    path = re.sub(r"^[LG]\['\w+'\](\[\d+\])?", "", path)  # a variable of the compiled function, or one of its *args
    parts = re.split(r"[.\[\]']+", path)
    return ".".join(p for p in parts if p and p not in ("self", "_orig_mod"))
