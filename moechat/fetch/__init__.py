"""From a model hub to a block store: repository metadata, transfers, conversion shard by shard."""
