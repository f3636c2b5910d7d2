# SPDX-License-Identifier: Apache-2.0
"""Runs the kernels' PTX on the CPU: their bits, their order of memory accesses and their barriers, without a GPU.

All threads of a launch are numpy lanes. Arithmetic is PTX's (one rounding an operation), so two kernels that must agree
to the bit on a GPU must agree here; approximate functions are correctly rounded here and are within their ulps there.
What a GPU decides by chance is drawn from a seed: which warp goes on, and when an asynchronous copy arrives.
It refuses what CUDA leaves undefined: accesses outside the arguments, misaligned ones, warps that are not together at a
shuffle, and global memory touched before the grid ahead has finished.

``ptx`` reads the text, ``instructions`` gives each one its meaning, ``machine`` schedules lanes and barriers,
``memory`` holds global and shared memory, ``runtime`` launches: it stands in for the CUDA runtime under the kernels'
own host code.
"""
