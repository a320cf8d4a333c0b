"""The loop that makes what is there become what is wanted: observe, plan, commit, act."""
