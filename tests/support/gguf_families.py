"""Families that tests write as GGUF files, by llama.cpp's name of the architecture."""

from __future__ import annotations

import gguf_families_deepseek as deepseek
import gguf_families_granite as granite
import gguf_families_grouped as grouped
import gguf_families_indexed as indexed
import gguf_families_qwen as qwen
import gguf_families_sliding as sliding
import gguf_families_states as states
import gguf_families_windows as windows

FAMILIES = {
    "gpt-oss": qwen.GPT_OSS,
    "qwen3next": qwen.QWEN3_NEXT,
    "qwen35moe": qwen.QWEN35,
    "glm4moe": deepseek.GLM4_MOE,
    "bailingmoe2": deepseek.BAILING,
    "deepseek2 (V2)": deepseek.DEEPSEEK_V2,
    "deepseek2 (V3)": deepseek.DEEPSEEK_V3,
    "deepseek2 (GLM Flash)": deepseek.GLM_FLASH,
    "mistral4": deepseek.MISTRAL4,
    "qwen2moe": grouped.QWEN2_MOE,
    "minimax-m2": grouped.MINIMAX_M2,
    "dots1": grouped.DOTS1,
    "hunyuan-moe": grouped.HUNYUAN,
    "ernie4_5-moe": grouped.ERNIE,
    "lfm2moe": grouped.LFM2,
    "phimoe": grouped.PHIMOE,
    "granitemoe": granite.GRANITE,
    "granitehybrid": granite.GRANITE_HYBRID,
    "afmoe": grouped.AFMOE,
    "laguna": windows.LAGUNA,
    "gemma4": windows.GEMMA4,
    "mimo2": sliding.MIMO2,
    "mimo2 (V2.5)": sliding.MIMO25,
    "exaone-moe": sliding.EXAONE,
    "cohere2moe": sliding.COHERE2,
    "kimi-linear": states.KIMI,
    "llama4": states.LLAMA4,
    "nemotron_h_moe": states.NEMOTRON,
    "deepseek32": indexed.DEEPSEEK_V32,
    "deepseek4": indexed.DEEPSEEK_V4,
    "glm-dsa": indexed.GLM_DSA,
}
