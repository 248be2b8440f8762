"""Published models: their files, their tensor names, and the same parameters under our names."""
