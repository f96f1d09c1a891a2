"""How a job goes, for readers: events as sentences, live streams, series of metrics, logs, Prometheus."""
