"""The ``moechat`` command: the only code that prints."""
