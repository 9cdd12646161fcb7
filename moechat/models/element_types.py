"""Element types of the native code."""

from __future__ import annotations

import torch

# torch type -> its name in the native code.
ELEMENTS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
