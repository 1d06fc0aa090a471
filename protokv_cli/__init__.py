"""The command line of ProtoKV: one file a subcommand, no tensor code, nothing heavy imported for
`--help`.
"""
