"""Execution of expert layers over stored blocks."""

import moechat.models  # noqa: F401 - before any other import of transformers, which would import hqq
