"""The architectures of llama.cpp that moechat reads from GGUF files."""

from __future__ import annotations

from collections.abc import Mapping

from moechat.models.gguf_families import (
    bailing,
    deepseek,
    deepseek_v4,
    early,
    glm,
    gpt_oss,
    granite,
    indexed,
    kimi,
    llama4,
    nemotron,
    phimoe,
    qwen,
    sigmoid,
    sliding,
    softmax,
    windows,
)
from moechat.models.gguf_families.architecture import Architecture

ARCHITECTURES: Mapping[str, Architecture] = {
    **early.ARCHITECTURES,
    **gpt_oss.ARCHITECTURES,
    **qwen.ARCHITECTURES,
    **glm.ARCHITECTURES,
    **bailing.ARCHITECTURES,
    **deepseek.ARCHITECTURES,
    **sigmoid.ARCHITECTURES,
    **softmax.ARCHITECTURES,
    **granite.ARCHITECTURES,
    **windows.ARCHITECTURES,
    **sliding.ARCHITECTURES,
    **kimi.ARCHITECTURES,
    **llama4.ARCHITECTURES,
    **phimoe.ARCHITECTURES,
    **nemotron.ARCHITECTURES,
    **deepseek_v4.ARCHITECTURES,
    **indexed.ARCHITECTURES,
}
