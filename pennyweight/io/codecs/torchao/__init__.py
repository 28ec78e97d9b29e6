"""torchao's files: its tensor classes as they are stored, in safetensors (0.14 and later) and in pickles (0.8 on).

A class of torchao says which of our tensors it can represent (``holds``), builds one from its stored members
(``build``), and gives the members of one (``take``). The names in ``import torchao`` are another distribution,
``pennyweight_torchao``, which stands on these.
"""
