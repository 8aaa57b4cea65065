"""The studio: what the pages call. Pages only draw; everything that can be tested without a browser is here."""
