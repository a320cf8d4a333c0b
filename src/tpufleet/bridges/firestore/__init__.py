"""The Firestore collection `tpu_jobs`: documents are code to run, and tell what became of it."""
