"""How a job proceeds, for readers: live streams, series of metrics, logs."""
