"""The control loop: observe, plan, commit, act."""
