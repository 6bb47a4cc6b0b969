"""Is this a host without a GPU?"""

from __future__ import annotations

import glob
from functools import cache


@cache
def is_cpu_only() -> bool:
    """Whether no GPU can be used here: no NVIDIA device file, and torch sees no GPU.

    The device files are asked first, so that a GPU host does not pay for importing torch here.
    """
    if glob.glob("/dev/nvidia*"):
        return False
    import torch

    return not torch.cuda.is_available()
