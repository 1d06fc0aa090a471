"""States on disk and in object stores: a header and named tensors, whole or absent, verified on
loading.

The path chooses the form: `.safetensors`, `.pt` or a `.zarr` folder; one of the first two also at
`s3://`, `gs://` and `az://`. `protokv.state.reader.StateReader.open` is the way in, for commands
and servers that show a state or ask it:

    reader = StateReader.open(path)           # reads the header: reader.header, .commits_s
    open_session(reader.at(90.0)).ask("...")  # the commit at 90 s; loads tensors and model
    describe_state(path), compare_states(a, b) # the documents of `protokv inspect`

`protokv.stream.opening` makes sessions of states. `protokv.state.checkpoint.save_state` is the way
out, and `protokv.state.store.StateStore` holds the lock of a longer one.
"""
