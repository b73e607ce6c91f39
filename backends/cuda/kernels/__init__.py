"""Triton kernels, each behind a function that takes torch tensors.

Importing a module of this package needs torch and, save for `layout` and `unpack`, Triton; so only
code that is about to compute imports one. With TRITON_INTERPRET=1 they run on CPU tensors.

A result's bits depend on its own row alone, not on how many rows share the launch: a kernel exists
once for every number of columns, sums run over K and over positions in a fixed order, and what a
launch may choose (tile sizes, whether splits run side by side or one after another) changes no
order. Fused multiply-adds are written out, and the compiler's own are off where two variants of a
kernel must agree.
"""
