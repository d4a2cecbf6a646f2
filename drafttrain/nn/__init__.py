"""Building blocks shared by training and serving: attention, losses, caches, sampling."""
