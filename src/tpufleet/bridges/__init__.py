"""Other people's queues: what they ask for goes in as jobs, what becomes of it goes back."""
