"""The names under which transformers passes a model's attention cache, which differ between its versions.

Since 5.24 all arguments and fields of outputs are called ``cache``. Before, attention and whole models said
``past_key_values``, and mixers with states ``cache_params``. The old names still work there, with a warning,
but modules hand on the new one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers.modeling_outputs import MoeCausalLMOutputWithPast

_NEW = any(field.name == "cache" for field in dataclasses.fields(MoeCausalLMOutputWithPast))

# The argument of models, layers and attention, and the field of a model's output.
CACHE = "cache" if _NEW else "past_key_values"
# The argument of mixers with states, such as linear attention and Mamba.
STATES = "cache" if _NEW else "cache_params"


def cache_of(output: Any) -> Any:
    """The cache in a model's output."""
    return getattr(output, CACHE)
