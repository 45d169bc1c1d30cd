{{/* Names, labels and small checks that the other templates share. */}}

{{- define "prefill.name" -}}
{{ .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Prefix of object names: the release name, with the chart's name added where it lacks it. 40 characters leave room for suffixes. */}}
{{- define "prefill.fullname" -}}
{{- $name := include "prefill.name" . -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains $name .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{/* Name of cluster-scoped objects: several namespaced releases may live in one cluster. */}}
{{- define "prefill.clusterName" -}}
{{ if .Values.scope.namespaced }}{{ .Release.Namespace }}-{{ end }}{{ include "prefill.fullname" . }}
{{- end }}

{{- define "prefill.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "prefill.fullname" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{/* Frozen: the Deployment's selector is immutable. */}}
{{- define "prefill.selectorLabels" -}}
app.kubernetes.io/name: {{ include "prefill.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "prefill.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: prefill
{{ include "prefill.selectorLabels" . }}
{{- end }}

{{/* Labels, and annotations if there are any, of one object: `include "prefill.metadata" (list . $labels $annotations)`. */}}
{{- define "prefill.metadata" -}}
{{- $ := index . 0 -}}
labels:
  {{- merge (dict) (index . 1) (include "prefill.labels" $ | fromYaml) $.Values.commonLabels | toYaml | nindent 2 }}
{{- with merge (dict) (index . 2) $.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Reference of an image: `include "prefill.image" (list . .Values.image)`. */}}
{{- define "prefill.image" -}}
{{- $ := index . 0 -}}
{{- with index . 1 -}}
{{- with .registry }}{{ . }}/{{ end }}{{ .repository }}
{{- if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{/* Selector and labels of the directory's pod and Service; frozen like those above. */}}
{{- define "prefill.directory.selectorLabels" -}}
{{- merge (dict "app.kubernetes.io/component" "directory") (include "prefill.selectorLabels" . | fromYaml) | toYaml }}
{{- end }}

{{/* What pools write into kvd.directoryAddress. */}}
{{- define "prefill.directory.address" -}}
{{ include "prefill.fullname" . }}-directory.{{ .Release.Namespace }}.svc:{{ .Values.directory.port }}
{{- end }}

{{/* Namespaces that get a Role, as {"items": [...]}: none in cluster-wide mode. */}}
{{- define "prefill.watchedNamespaces" -}}
{{- $items := list -}}
{{- if .Values.scope.namespaced -}}
{{- $items = .Values.scope.watchNamespaces | default (list .Release.Namespace) -}}
{{- end -}}
{{ dict "items" $items | toJson }}
{{- end }}
