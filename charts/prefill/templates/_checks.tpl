{{/* Contradictions that values.schema.json can't see. */}}
{{- define "prefill.check" -}}
{{- with .Values.leaderElection }}
{{- if not (and (lt (int .retryPeriodSeconds) (int .renewDeadlineSeconds)) (lt (int .renewDeadlineSeconds) (int .leaseDurationSeconds))) }}
{{- fail (printf "leaderElection: expected retryPeriodSeconds < renewDeadlineSeconds < leaseDurationSeconds, found %v, %v, %v" .retryPeriodSeconds .renewDeadlineSeconds .leaseDurationSeconds) }}
{{- end }}
{{- end }}
{{- if and .Values.scope.watchNamespaces (not .Values.scope.namespaced) }}
{{- fail "scope.watchNamespaces needs scope.namespaced: true; without it all namespaces are watched" }}
{{- end }}
{{- if and .Values.metrics.serviceMonitor.enabled (not .Values.metrics.enabled) }}
{{- fail "metrics.serviceMonitor.enabled needs metrics.enabled: it selects that Service" }}
{{- end }}
{{- if and .Values.directory.enabled (eq (int .Values.directory.port) (int .Values.directory.metricsPort)) }}
{{- fail (printf "directory.port and directory.metricsPort are both %v; expected two ports" .Values.directory.port) }}
{{- end }}
{{- end }}
