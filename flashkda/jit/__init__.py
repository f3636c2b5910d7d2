# SPDX-License-Identifier: Apache-2.0
"""Compile kernels, keep them in memory and on disk, build them ahead of time. Knows no KDA.

digest    what the sources and the toolchain are
key       the name of a compiled kernel
compiler  recipe to object, object to callable
resources what a compiled kernel uses
cache     load_kernel, prebuild
"""
