"""The sizes of a model as plain numbers, for plans and for loading. Needs no torch.

:mod:`moechat.models.outlining` counts them in a model without memory.
"""
