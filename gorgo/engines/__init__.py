"""Engine dialects, one file each: how a kind of replica is probed, scraped and read."""
