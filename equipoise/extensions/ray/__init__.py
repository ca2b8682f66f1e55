"""Ray: runs in workers of Ray Train, jobs of a sweep as trials of Ray Tune. Ray is imported on first use."""
