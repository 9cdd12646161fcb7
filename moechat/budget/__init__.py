"""What a budget of memory buys: needs of a model, pages, targets of the near tier, the strategy.

Plans and loading call the same functions. Needs no torch.
"""
