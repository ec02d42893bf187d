"""The questionnaire of `headway config`: asks, and never launches."""
