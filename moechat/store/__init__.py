"""The block store: reading checkpoints, converting them into expert blocks, opening and verifying stores."""
