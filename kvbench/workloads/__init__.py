"""Who arrives when, with how many tokens: seeded generators and replayed traces, all turned into a list of requests."""
