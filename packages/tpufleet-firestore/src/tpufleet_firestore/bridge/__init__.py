"""The Firestore collection `tpu_jobs`: each document is code to run, and receives its result."""
