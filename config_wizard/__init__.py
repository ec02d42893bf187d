"""The questionnaire of `headway config`; it never launches."""
