"""What the cache and the process are doing: JSON, figures for Prometheus, whether it is alive, and the dashboard."""
