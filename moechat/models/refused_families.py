"""Families of transformers that moechat cannot run, each with the reason.

Error messages and the table in ``moechat help models`` use it. It refuses no model by itself: moechat first
tries to build the model, and gives the reason only if that fails.
"""

from __future__ import annotations

# By model type.
REASONS = {
    "diffusion_gemma": "it does not write one token after another",
    "doge": "its default has no experts, and those that it can have are rows of embeddings",
    "ernie4_5_vl_moe": "a layer has experts for text and others for pictures",
    "inkling2": "its gate is capped softly",
    "inkling2_loop": "its gate is capped softly",
    "inkling2_loop_text": "its gate is capped softly",
    "inkling2_text": "its gate is capped softly",
    "jetmoe": "attention has experts too, in a form of its own",
    "longcat_flash": "its routers also choose experts that have no weights",
    "muse_spark": "each expert's output is normalised",
}
# Types that transformers does not build from their own default configuration, so nothing is known of them.
NOT_TRIED = ("dbrx", "deepseek_ocr2")
