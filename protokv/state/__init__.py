"""States on disk and in object stores: a header and named tensors, whole or absent, verified on loading.

The path chooses the form: `.safetensors`, `.pt`, a `.zarr` folder, or a repository in an object store.
"""
