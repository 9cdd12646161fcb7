"""Decoding steps without torch's price: what lies between the products of a layer, computed natively.

A family's modules stay as transformers has them. Those whose results can be reproduced are recognised by what
they compute, never by name, and get a ``forward`` of ours that takes over for passes it was made for and
leaves every other pass to the module's own. No result depends on the number of threads.
"""

from __future__ import annotations

from moechat.models.decode.quicken import Quickened, quicken

__all__ = ["Quickened", "quicken"]
