"""Native decoding steps: computes norms, rotary embedding, attention and routing without torch overhead.

transformers' modules are recognised by their results, never by name. A recognised module gets a native
``forward`` for the passes that the native code supports; all other passes use the module's own. Results do
not depend on the number of threads.
"""

from __future__ import annotations

from moechat.models.decode.install import NativeModules, install_native_modules

__all__ = ["NativeModules", "install_native_modules"]
