"""What plugs into the interfaces of the core: compact positions, evidence, recent frames, sharding, allocation."""
