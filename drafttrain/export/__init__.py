"""Exporters: the only place that knows the layouts of serving engines."""
