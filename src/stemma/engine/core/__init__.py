"""The step loop: requests, scheduler, runner."""
