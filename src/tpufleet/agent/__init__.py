"""On each host: run what is assigned, report, probe. Pulls; is never called."""
