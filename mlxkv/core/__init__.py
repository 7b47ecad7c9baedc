"""What everything else stands on: errors, units, settings, the platform. Imports nothing of mlxkv and never MLX."""
