"""Code from a Firestore collection, run as jobs."""
