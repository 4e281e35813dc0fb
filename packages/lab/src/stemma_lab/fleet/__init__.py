"""A fleet of simulated servers behind the real router, in virtual time (docs/how-to/fleet.md)."""
